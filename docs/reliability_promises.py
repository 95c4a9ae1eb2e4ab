"""Lists what reliability.md promises, and the tests of each promise."""

# (promise, command, where its runs are recorded). A place is "ci", a kind of record,
# "gpu" or "processes". "gpu" is the suite on GPUs that has run the command's tests: of
# p2p rather than collective, then on the most devices, then the newest. "processes" are
# the suites that ran in several processes.
PROMISES = (
    ("Ids outside [-1, E), of every class of values, touch no memory and are reported "
     "by `ep.check()`",
     "pytest tests/api/test_misuse.py tests/api/test_dispatch.py",
     ("ci", "gpu")),
    ("NaN and Inf only reach their own sums and blocks; n = 0 and unusual layouts "
     "work; sizes that cannot be counted or allocated are refused",
     "pytest tests/api/test_bad_values.py",
     ("ci", "gpu")),
    ("Wrong configs, shapes, dtypes, axes and routes of other handles raise "
     "ValueError or TypeError while tracing, and the message has value and remedy",
     "pytest tests/api/test_errors.py tests/api/test_errors_operands.py "
     "tests/api/test_options_errors.py tests/api/test_split_errors.py",
     ("ci", "gpu")),
    ("If a route was changed, an index out of range counts as absent before any "
     "access, and one in range shows nothing that was not sent in this call",
     "pytest tests/api/test_tampered.py; ctest -R tampered",
     ("ci", "gpu")),
    ("Whatever bytes are in ids, counts, messages, routes, sizes or attributes, "
     "nothing is read or written outside a buffer",
     "python -m tools.fuzz --minutes 30; ctest -R fuzz",
     ("ci", "fuzz")),
    ("p2p, shmem: a custom call is refused if any operand has a wrong size, rank or "
     "dtype, or any attribute a wrong value, in itself or for the group's windows",
     "ctest -R window_operands",
     ("ci",)),
    ("Double close, use after close, fork, pickling, garbage collection in any order "
     "and exit with calls in flight do no harm",
     "pytest tests/api/test_handle.py tests/api/test_handle_life.py",
     ("ci", "gpu")),
    ("A program from a persistent compilation cache never runs on the group of another "
     "handle or config",
     "pytest tests/api/test_handle.py -k persistent_cache",
     ("ci", "gpu")),
    ("Handles behave as a model says, in any order of calls and with several open",
     "pytest tests/api/test_state_machine.py",
     ("ci", "gpu")),
    ("Independent calls, many in flight and in several threads, are right and do not "
     "hang",
     "pytest tests/api/test_concurrency.py",
     ("ci", "gpu")),
    ("The same inputs give the same bytes under random delays of ranks",
     "pytest tests/api/test_determinism.py",
     ("ci", "gpu")),
    ("Results stay right in long runs with random shapes, routing, skew, formats and "
     "options",
     "python -m benchmarks.soak.soak --minutes 15",
     ("soak-cpu",)),
    ("The same on GPUs",
     "python -m benchmarks.soak.soak --minutes 10",
     ("soak-gpu",)),
    ("The same with one process per GPU, also over forced nodes, while other programs "
     "are compiled",
     "python -m benchmarks.soak.processes --processes 4 --minutes 10 --transport p2p; "
     "python -m benchmarks.soak.processes --processes 4 --ranks-per-node 2 --minutes "
     "10 --transport shmem",
     ("soak-processes",)),
    ("3,000 calls, 300 handles with their compilation (150 on GPUs) and 20,000 handles "
     "without leak no memory, and neither does opening and closing windows of p2p "
     "1,000 times",
     "pytest tests/api/test_leaks.py",
     ("ci", "gpu")),
    ("p2p: memory is what `ep.buffer_bytes` says, up to the driver's granule, and is "
     "allocated and freed with the handle",
     "pytest tests/transports/test_p2p_faults.py -k memory",
     ("gpu",)),
    ("p2p: if a rank is missing, late, raises, closes, or is in another call, every "
     "rank gets an error within `timeout_s` + 5 s that names both ranks; the process "
     "and other handles go on",
     "pytest tests/transports/test_p2p_faults.py",
     ("gpu",)),
    ("p2p, shmem, also over forced nodes: if a process is late, calls in another "
     "order, makes another call or one of another handle, closes instead, or has "
     "another config, the others get the error in time, and all go on together",
     "pytest tests/transports/test_process_faults.py",
     ("gpu",)),
    ("p2p: if a process raises and closes while the others are in a call, they get "
     "the error, and all go on together",
     "pytest tests/transports/test_processes_gpu.py -k raises",
     ("gpu",)),
    ("shmem: gives the same bytes as p2p, and behaves like it if a process raises or "
     "dies",
     "pytest tests/transports/test_shmem_gpu.py",
     ("gpu",)),
    ("p2p: if a process is killed in a call, the others get the error and go on over "
     "the survivors",
     "pytest tests/transports/test_processes_gpu.py -k killed",
     ("gpu",)),
    ("`init` in several processes, without GPUs: if a process is killed before, at any "
     "step or after, gives up, is late or has other arguments, `init` ends in time "
     "for all and names that process; descriptors go only to the job's own processes",
     "pytest tests/transports/test_multiprocess_windows.py "
     "tests/transports/test_rendezvous.py tests/transports/test_descriptors.py",
     ("ci",)),
    ("The same with a process attacked at each point of `init`, and of "
     "`shared_handle`, by an exception, Ctrl-C, a stop of some seconds (of each "
     "process, also of the coordinator) and SIGKILL, or left without descriptors or "
     "sockets from there on: it succeeds in all processes or in none, in time, names "
     "nobody else, leaves nothing open, and the next one succeeds",
     "PYTHONPATH=tests python tests/workers/attack_init.py",
     ("attack",)),
    ("p2p over fake hosts, without GPUs: one NVLink fabric is accepted; several, none "
     "or one whose handles fail are refused, with the same error in all processes",
     "pytest tests/transports/test_fabric.py",
     ("ci",)),
    ("The semantics with one process per GPU: p2p, and shmem over forced nodes",
     "python -m tools.record_suite --processes 4 --transports p2p; python -m "
     "tools.record_suite --processes 4 --ranks-per-node 2 --transports shmem",
     ("processes",)),
    ("p2p: calls keep their order, also from threads, in graphs and beside XLA's "
     "collectives",
     "pytest tests/transports/test_p2p_order.py",
     ("gpu",)),
    ("A whole layer in CUDA graphs, also in halves, is right when replayed 10,000 "
     "times with changing routing",
     "pytest tests/transports/test_graph_layer.py",
     ("gpu",)),
    ("p2p: the kernels access only their own memory, in all formats, in whole calls "
     "and in halves; those of whole calls leave no barrier early; bfloat16 calls have "
     "no races in shared memory",
     "tools/sanitize.sh",
     ("sanitize",)),
    ("p2p, shmem: accesses of threads, bulk copies and puts to other nodes never race, "
     "whether in shared memory, between blocks or between ranks (random calls and "
     "failing waits, run thread by thread without a GPU under ThreadSanitizer)",
     "ctest -R race",
     ("ci",)),
    ("The protocol of flags and credits is right, under ThreadSanitizer and in a "
     "model that tries every order of steps",
     "ctest -R signals; pytest tests/transports/test_protocol_model.py",
     ("ci",)),
    ("p2p: the kernels, run thread by thread in random order without a GPU, give the "
     "CPU's bytes, stay in their memory and end every wait; kernels with an injected "
     "error are caught",
     "ctest -R calls; ctest -R kernels; ctest -R mutant",
     ("ci",)),
    ("jax_ep runs on the oldest and the newest JAX and on Python 3.11 to 3.13, with "
     "one wheel for 3.12 and up, and says what to do when JAX changes",
     ".ci/run newest python313 readme; pytest tests/tools/test_compatibility.py",
     ("ci",)),
    ("jax_ep uses no network and starts no processes at run time; everything in a "
     "wheel is named",
     "pytest tests/tools/test_wheel_contents.py",
     ("ci",)),
)  # fmt: skip
