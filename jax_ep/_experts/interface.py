"""What a layer asks of its experts, whoever wrote them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from jax_ep._core import calls
from jax_ep._core.literals import Format, WeightFormat

# Keywords that change none of the answers of experts if a partial binds them.
_HARMLESS = {"activation", "device", "wgrad"}
# What such a partial takes from its experts.
_ANSWERS = (
    "name",
    "takes_dispatched",
    "takes_pair",
    "takes_ungated",
    "splits_by_group",
    "casts_weights",
    "quantizes",
)


class Case(NamedTuple):
    """What decides which implementations can run.

    Attributes:
        device: the `jax.Device` to run on.
        dtype: name of the dtype of the rows.
    """

    device: Any
    dtype: str


class Experts:
    """Experts of a layer. The answers here are right for any function of a user's.

    Attributes:
        name: what errors call them; of the package's own, the name below
            `jax_ep.experts`.
        takes_dispatched: whether they take a whole `Dispatched` instead of rows and
            group sizes.
        takes_pair: whether gate_up may be a pair of gate and up, each `[L, H, F]`.
        takes_ungated: whether gate_up may be up alone, `[L, H, 1, F]`.
        splits_by_group: whether rows are the same if they are called for some groups
            at a time.
        casts_weights: whether weights may have any floating dtype, whose precision
            their gradients then have.
        quantizes: the format of codes that they make of weights in each call, so that
            a layer can make them before it gathers or copies weights; None if they
            multiply the weights as they are.
    """

    name: str
    takes_dispatched: bool = False
    takes_pair: bool = False
    takes_ungated: bool = True
    splits_by_group: bool = False
    casts_weights: bool = False
    quantizes: WeightFormat | None = None

    @property
    def __name__(self) -> str:
        """The name, as functions have one."""
        return self.name

    def __repr__(self) -> str:
        """The public name."""
        return f"jax_ep.experts.{self.name}"

    @property
    def given(self) -> Callable[..., Any]:
        """The function itself, whose signature is known."""
        return self

    def __call__(self, *operands: Any, **options: Any) -> Any:
        """Applies the experts; `jax_ep.moe_ffn` says to what."""
        raise NotImplementedError

    def on(self, device: Any) -> Callable[..., Any]:
        """Returns the same for the `jax.Device` that they will run on."""
        del device
        return self

    def obstacle(self, case: Case) -> str | None:
        """Returns "<what they need>, got <what there is>", or None if they run."""
        del case
        return None

    def reads_tail(self, case: Case) -> bool:
        """Whether rows past the groups may change results or gradients.

        If not, they stay uncleared. With capacity for the worst case, most rows of a
        large EP group are there, and clearing them takes as long as the exchange.
        """
        del case
        return True

    def multiple_of(self, weights: WeightFormat | None, rows: Format) -> int:
        """Returns what H and a rank's part of F must be multiples of.

        Args:
            weights: the format of codes in place of the weights, or None.
            rows: the config's `dispatch_format`.
        """
        del weights, rows
        return 1


@dataclasses.dataclass(frozen=True)
class _Function(Experts):
    """A user's function."""

    run: Callable[..., Any]
    takes_dispatched: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", calls.name_of(self.run))

    @property
    def given(self) -> Callable[..., Any]:
        return self.run

    def __call__(self, *operands: Any, **options: Any) -> Any:
        return self.run(*operands, **options)


@dataclasses.dataclass(frozen=True)
class _Partial(Experts):
    """Experts of the package with keywords that change no answer."""

    run: functools.partial[Any]

    def __post_init__(self) -> None:
        for name in _ANSWERS:
            object.__setattr__(self, name, getattr(self.run.func, name))

    @property
    def given(self) -> Callable[..., Any]:
        return self.run

    def __call__(self, *operands: Any, **options: Any) -> Any:
        return self.run(*operands, **options)

    def on(self, device: Any) -> Callable[..., Any]:
        run: Any = self.run.func
        return functools.partial(run.on(device), **self.run.keywords)

    def reads_tail(self, case: Case) -> bool:
        run: Any = self.run.func
        return run.reads_tail(case)

    def multiple_of(self, weights: WeightFormat | None, rows: Format) -> int:
        run: Any = self.run.func
        return run.multiple_of(weights, rows)


def of(run: Callable[..., Any]) -> Experts:
    """Returns what a layer asks; a user's function is known by its mark alone."""
    if isinstance(run, Experts):
        return run
    if isinstance(run, functools.partial):
        inner = of(run.func)
        known = not isinstance(inner, _Function)
        if known and not run.args and run.keywords.keys() <= _HARMLESS:
            return _Partial(run)
        return _Function(run, inner.takes_dispatched)
    return _Function(run, getattr(run, "takes_dispatched", False))
