"""What reliability.md promises, and what tests it."""

# (promise, command, where its runs are recorded). A place is "ci", a kind of record,
# "gpu": the suite on GPUs that has run the command's tests, of p2p before collective,
# on the most devices, the newest of those; or "processes": those that ran in several.
PROMISES = (
    ("Ids outside [-1, E), of each value class, touch no memory and are reported by "
     "`ep.check()`", "pytest tests/test_misuse.py tests/test_dispatch.py",
     ("ci", "gpu")),
    ("NaN and Inf reach their own sums and blocks alone; n = 0; layouts; sizes that "
     "cannot be counted or held", "pytest tests/test_bad_values.py", ("ci", "gpu")),
    ("Wrong configs, shapes, dtypes, axes, routes of other handles: ValueError or "
     "TypeError while tracing, with value and remedy",
     "pytest tests/test_errors.py tests/test_errors_operands.py "
     "tests/test_options_errors.py tests/test_split_errors.py", ("ci", "gpu")),
    ("Changed routes: an index out of range counts as absent, before any access, and "
     "one in range shows nothing that was not sent in this call",
     "pytest tests/test_tampered.py; ctest -R tampered", ("ci", "gpu")),
    ("Any bytes as ids, counts, messages, routes, sizes or attributes: nothing is read "
     "or written outside of a buffer",
     "python benchmarks/fuzz.py --minutes 30; ctest -R fuzz", ("ci", "fuzz")),
    ("p2p, shmem: a custom call of which one operand has another size, rank or dtype, "
     "or an attribute another value, is refused, by itself or against the windows",
     "ctest -R window_operands", ("ci",)),
    ("Double close, use after close, fork, pickling, collection in any order, exit "
     "with calls in flight", "pytest tests/test_handle.py tests/test_handle_life.py",
     ("ci", "gpu")),
    ("A persistent compilation cache never meets another handle's or config's group",
     "pytest tests/test_handle.py -k persistent_cache", ("ci", "gpu")),
    ("Handles in any order of calls, with several at once, are as the model says",
     "pytest tests/test_state_machine.py", ("ci", "gpu")),
    ("Independent calls, many in flight, several threads: right, and no hang",
     "pytest tests/test_concurrency.py", ("ci", "gpu")),
    ("The same inputs give the same bytes under random delays of ranks",
     "pytest tests/test_determinism.py", ("ci", "gpu")),
    ("Right results for long, with random shapes, routing, skew, formats and options",
     "python benchmarks/soak.py --minutes 15", ("soak-cpu",)),
    ("The same on GPUs", "python benchmarks/soak.py --minutes 10",
     ("soak-gpu",)),
    ("The same with a process a GPU, over forced nodes too, while others compile",
     "python benchmarks/soak_processes.py --processes 4 --minutes 10 --transport p2p; "
     "python benchmarks/soak_processes.py --processes 4 --ranks-per-node 2 --minutes "
     "10 --transport shmem", ("soak-processes",)),
    ("3,000 calls, 300 handles with their compilation (150 on GPUs) and 20,000 "
     "without leave no memory behind; p2p: nor do windows, opened and closed 1,000 "
     "times",
     "pytest tests/test_leaks.py", ("ci", "gpu")),
    ("p2p: memory is what `ep.buffer_bytes` says, to the driver's granule, and comes "
     "and goes with the handle", "pytest tests/test_p2p_faults.py -k memory", ("gpu",)),
    ("p2p: a rank that is missing, late, raises, closes, or is in another call: an "
     "error on every rank within `timeout_s` + 5 s that names both; the process and "
     "other handles go on", "pytest tests/test_p2p_faults.py", ("gpu",)),
    ("p2p, shmem, also over forced nodes: a process that calls late, in another order, "
     "another call or another handle, that closes instead, or that has another config: "
     "the others get the error in time, and all go on together",
     "pytest tests/test_process_faults.py", ("gpu",)),
    ("p2p: a process that raises and closes while the others are inside: they get the "
     "error, and all go on together",
     "pytest tests/test_processes_gpu.py -k raises", ("gpu",)),
    ("shmem: the same bytes as p2p, and the same with a process that raises or dies",
     "pytest tests/test_shmem_gpu.py", ("gpu",)),
    ("p2p: a process that is killed in a call: the others get the error, and go on "
     "over the living", "pytest tests/test_processes_gpu.py -k killed", ("gpu",)),
    ("Processes that meet in `init`, without GPUs: one that is killed before, at any "
     "step or after, gives up, comes late or with other arguments ends it for all, in "
     "time, and is named; descriptors go to the job's own processes alone",
     "pytest tests/test_multiprocess_windows.py tests/test_meeting.py "
     "tests/test_descriptors.py", ("ci",)),
    ("The same at 30 points of `init`, by an exception, Ctrl-C, a stop of some seconds "
     "(also of the coordinator) and death: it succeeds in all processes or in none, in "
     "time, leaves nothing open, and the next one succeeds",
     "python tests/attack_init.py", ("attack",)),
    ("p2p over imagined hosts, without GPUs: one NVLink fabric serves; several, none "
     "or one whose handles fail are refused in the same words in all processes",
     "pytest tests/test_fabric.py", ("ci",)),
    ("The semantics with a process a GPU: p2p, and shmem over forced nodes",
     "python benchmarks/record_suite.py --processes 4 --transports p2p; "
     "python benchmarks/record_suite.py --processes 4 --ranks-per-node 2 "
     "--transports shmem", ("processes",)),
    ("p2p: calls keep their order, also from threads, graphs and beside XLA's "
     "collectives", "pytest tests/test_p2p_order.py", ("gpu",)),
    ("A whole layer in CUDA graphs, also in halves, replayed 10,000 times with routing "
     "that changes", "pytest tests/test_graph_layer.py", ("gpu",)),
    ("p2p: the kernels touch no memory but their own, in all formats, whole and in "
     "halves, and whole ones leave no barrier early; bfloat16 calls have no races in "
     "shared memory",
     "benchmarks/sanitize.sh", ("sanitize",)),
    ("p2p, shmem: no accesses of threads, bulk copies and puts to other nodes race, in "
     "shared memory, between blocks and between ranks: random calls and waits that "
     "fail, run thread by thread without a GPU under ThreadSanitizer",
     "ctest -R race", ("ci",)),
    ("The protocol of flags and credits, under ThreadSanitizer and in a model "
     "that changes the order of steps",
     "ctest -R signals; pytest tests/test_protocol_model.py", ("ci",)),
    ("p2p: the kernels, run thread by thread in random order without a GPU, give the "
     "CPU's bytes, stay in their memory and end every wait; with an error put in, they "
     "do not", "ctest -R calls; ctest -R kernels; ctest -R mutant", ("ci",)),
    ("Runs on the oldest and the newest JAX, Python 3.11 to 3.13, one wheel for all of "
     "3.12 and up; tells what to do when JAX changes",
     ".ci/run newest python313 readme; pytest tests/test_compatibility.py", ("ci",)),
    ("No network and no processes at run time; all that a wheel contains is named",
     "pytest tests/test_supply.py", ("ci",)),
)  # fmt: skip
