from typing import Any

MAX_WINDOW_RANKS: int
FIRST_EPOCH: int

class WindowConfig:
    def __init__(
        self,
        *,
        format: str,
        hidden: int,
        element_bytes: int,
        wire_element_bytes: int,
        tokens: int,
        dispatch_tokens: int,
        combine_tokens: int,
        top_k: int,
        ranks: int,
        local_experts: int,
        pending_calls: int,
    ) -> None: ...

def targets() -> dict[str, Any]: ...
def open_group(key: int, ordinals: list[int], ranks: list[int]) -> None: ...
def open_windows(
    key: int,
    ep_groups: list[list[int]],
    config: WindowConfig,
    *,
    timeout_s: float,
    num_sms: int,
    first_epoch: int,
) -> int: ...
def close_group(key: int) -> None: ...
def take_invalid_ids(key: int) -> list[tuple[int, int, int, int, int]]: ...
def wait_failures(key: int) -> list[tuple[int, str]]: ...
def pool_threads(key: int) -> int: ...
def device_count() -> int: ...
def p2p_obstacle(ep_groups: list[list[int]]) -> tuple[str, str] | None: ...
