"""Launches soak.py's programs from threads, and counts what came back."""

from __future__ import annotations

import collections
import random
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.soak import program

IN_FLIGHT = 4  # launches per thread
SHOW_S = 10
# Bytes that may be gone at the end: an array lost in every launch would be more.
MOST_OF_DEVICE = 64 << 20
# The same for each new program. XLA's kernel for small sums over GPUs keeps 2 MiB on
# each GPU for every program that has it (jax 0.11.2). `gathered` has it, one of three
# kinds; the others keep nothing. With no new programs 25,000 launches left 2 MiB in
# use.
MOST_OF_DEVICE_A_PROGRAM = 1 << 20
MOST_OF_HEAP, MOST_OF_HEAP_A_LAUNCH = 16 << 20, 1 << 10
COMPILE_EVERY_S = 1
COMPILED_SHAPES = 8


class Tally:
    """Counts what came back so far."""

    def __init__(self):
        self.calls = self.checks = 0
        self.failures = collections.Counter()
        self.statistics = collections.Counter()
        self.first_failure = None

    def add(self, steps, where, results):
        """Adds `results`: for each layer (mismatches, statistics), by [rank, step]."""
        for index, (counts, statistics) in enumerate(results):
            for name, value in statistics.items():
                self.statistics[name] += int(np.sum(value, dtype=np.int64))
            for name, bad in counts.items():
                bad = np.asarray(bad)
                self.checks += bad.size
                if not bad.any():
                    continue
                self.failures[name] += int(np.count_nonzero(bad))
                if self.first_failure is None:
                    rank, step = (int(i) for i in np.argwhere(bad)[0])
                    self.first_failure = {
                        **where,
                        "step": step,
                        "layer": index,
                        "what": name,
                        "rank": rank,
                        "elements": int(bad[rank, step]),
                    }
                    print("MISMATCH", self.first_failure, flush=True)
        self.calls += steps * len(results) * program.CALLS_A_LAYER


class Launcher:
    """One thread's launches, which follow from the seed and the thread's number.

    Their operands come from the host. With `carried` they come from the first device:
    on several GPUs of a process, launches may then hang beside new programs
    (docs/sharp_bits.md).
    """

    carried = False

    def __init__(self, thread, programs, seed, steps, calls, fetch=jax.device_get):
        """Takes `programs` by name: (executable, how many layers it has)."""
        self.thread, self.programs, self.fetch = thread, programs, fetch
        self.steps, self.wanted, self.enqueued = steps, calls, 0
        self.choose = random.Random(seed * 2 + thread)
        self.seed = seed
        self.tally, self.launches = Tally(), 0
        self.error = None

    def enqueue(self):
        # Each program once, then random ones.
        names = list(self.programs)
        first = names[self.launches : self.launches + 1]
        n = self.choose.choice(first or names)
        run, layers = self.programs[n]
        numbers = np.array([self.seed, self.thread, self.launches], np.uint32)
        result = run(jnp.asarray(numbers) if self.carried else numbers)
        where = {"thread": self.thread, "launch": self.launches, "n": n}
        self.launches += 1
        self.enqueued += self.steps * layers * program.CALLS_A_LAYER
        if self.choose.random() < 0.1:
            time.sleep(self.choose.random() / 100)
        return where, result

    def run(self, deadline, launches):
        """Launches up to one of the limits; nothing is in flight afterwards."""
        waiting = collections.deque()
        try:
            while True:
                more = (
                    self.enqueued < self.wanted
                    and self.launches < launches
                    and time.monotonic() < deadline
                )
                if more:
                    waiting.append(self.enqueue())
                    if len(waiting) < IN_FLIGHT:
                        continue
                if not waiting:
                    return
                where, results = waiting.popleft()
                self.tally.add(self.steps, where, self.fetch(results))
        except Exception as raised:
            self.error = f"{type(raised).__name__}: {raised}"
            print("ERROR", self.error, flush=True)

    @property
    def done(self):
        return self.error is not None or self.enqueued >= self.wanted


def sorted_product(n, count, devices):
    """Multiplies and sorts on each device by itself."""
    made = jax.jit(lambda a: jnp.sort(a @ a.T, axis=0) + count)
    for device in devices:
        found = made(jax.device_put(np.ones((n, n), np.float32), device))
        np.testing.assert_array_equal(found, n + count)


def tuned_product(n, count, devices):
    """Multiplies on each device; the size is new, so that XLA times several kernels."""
    made = jax.jit(lambda a: (a @ a.T).astype(jnp.float32) + count)
    for device in devices:
        a = np.ones((64 + n + count, 512), jnp.bfloat16)
        found = made(jax.device_put(a, device))
        np.testing.assert_array_equal(found, 512 + count)


def gathered(n, count, devices):
    """Runs one program on all devices, with XLA's own collectives."""
    mesh = jax.sharding.Mesh(np.array(devices), ("all",))
    spec = jax.P("all")

    def add(a):
        return jax.lax.all_gather(jax.lax.psum(a @ a.T, "all") + count, "all")

    made = jax.jit(
        jax.shard_map(add, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    )
    a = np.ones((len(devices) * n, n), np.float32)
    found = made(jax.device_put(a, jax.NamedSharding(mesh, spec)))
    np.testing.assert_array_equal(found, len(devices) * n + count)


def new_programs(devices):
    """Returns the programs that a thread can run beside calls on these devices.

    Programs on devices of several processes would need the same order everywhere. On
    CPUs, XLA's collectives need a thread for each device, and calls hold these threads.
    """
    if devices[0].platform == "cpu":
        return (sorted_product,)
    alone = len(devices) == 1 or jax.process_count() > 1
    return (sorted_product, tuned_product) + (() if alone else (gathered,))


class Compiler:
    """Compiles and runs other programs on all devices beside the calls, if `active`."""

    def __init__(self, devices, active):
        self.devices, self.active = devices, active
        self.programs = new_programs(devices)
        self.count, self.error = 0, None

    def first(self):
        """Compiles one of each kind and shape, for which JAX keeps more than later."""
        for _ in range(COMPILED_SHAPES * len(self.programs)):
            self.one()

    def one(self):
        shape, kind = divmod(self.count, len(self.programs))
        n = 8 * (1 + shape % COMPILED_SHAPES)
        self.programs[kind](n, self.count, self.devices)
        self.count += 1

    def run(self, stop):
        """Compiles until `stop`, at least once, however busy the machine is."""
        try:
            while True:
                self.one()
                if stop.wait(COMPILE_EVERY_S):
                    return
        except Exception as raised:
            self.error = f"{type(raised).__name__}: {raised}"


def together(launchers, compiler, deadline, launches):
    """Runs all launchers up to `launches` each in total; stops them if one fails."""
    stop, started = threading.Event(), time.monotonic()
    compiling = threading.Thread(target=compiler.run, args=(stop,))
    threads = [
        threading.Thread(target=launcher.run, args=(deadline, launches))
        for launcher in launchers
    ]
    if compiler.active:
        compiling.start()
    for thread in threads:
        thread.start()
    shown = started
    while any(thread.is_alive() for thread in threads):
        threads[0 if threads[0].is_alive() else -1].join(0.2)
        if any(one.error for one in (compiler, *launchers)):
            for launcher in launchers:
                launcher.wanted = 0
        if time.monotonic() - shown > SHOW_S:
            shown = time.monotonic()
            calls = sum(launcher.tally.calls for launcher in launchers)
            print(f"{calls} calls, {compiler.count} compilations", flush=True)
    stop.set()
    if compiler.active:
        compiling.join()


def grown(record):
    """Says how much memory a record shows as lost; None if it is flat.

    On CPUs the resident size of a process does not tell: XLA's threads leave gaps.
    """
    if record["device"] != "cpu":
        lost = record["free_memory_start"] - record["free_memory_end"]
        programs = record["compilations"] - record["settled"][1]
        if lost > MOST_OF_DEVICE + programs * MOST_OF_DEVICE_A_PROGRAM:
            return f"a device has {lost} bytes less than at the start"
    if record["heap_start"] is not None:
        more = record["heap_end"] - record["heap_start"]
        launches = record["launches"] - record["settled"][0]
        if more > MOST_OF_HEAP + launches * MOST_OF_HEAP_A_LAUNCH:
            return f"the host's heap has {more} bytes more after {launches} launches"
    return None


def merged(launchers, compiler):
    """Merges what all launchers have found, for the record."""
    tallies = [launcher.tally for launcher in launchers]
    failures = sum((tally.failures for tally in tallies), collections.Counter())
    statistics = sum((tally.statistics for tally in tallies), collections.Counter())
    firsts = [tally.first_failure for tally in tallies if tally.first_failure]
    errors = [one.error for one in (*launchers, compiler) if one.error]
    return {
        "calls": sum(tally.calls for tally in tallies),
        "launches": sum(launcher.launches for launcher in launchers),
        "checks": sum(tally.checks for tally in tallies),
        "failures": dict(failures),
        "first_failure": firsts[0] if firsts else None,
        "error": errors[0] if errors else None,
        **{name: statistics[name] for name in program.STATISTICS},
    }
