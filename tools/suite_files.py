"""Which files of tests record_suite.py runs, and in how many parts."""

# Files of tests that are the same on every machine.
HOST_ONLY = (
    *("benchmark_fuzz", "benchmark_layer_report", "benchmark_nodes"),
    *("benchmark_overlap_report", "benchmark_report"),
    "compatibility",
    "default_run",
    "demo",
    "formats_errors",
    "generate",
    "gpu_lock",
    "import",
    "launch",
    "multiprocess_plugin",
    "plugins",
    "protocol_model",
    "readme",
    "release",
    "suite_record",
    "suite_resume",
    "wheel_contents",
)
# Files that choose their transport themselves, none of them collective.
P2P_ONLY = ("test_p2p", "test_process", "test_shmem_gpu")
# Files that start processes on GPUs, which may share one.
SHARING = ("test_process", "test_shmem_gpu")
# Parts in which files that take minutes run side by side.
LONG = {
    "test_p2p_split.py": 4,
    "test_p2p.py": 4,
    "test_p2p_options.py": 5,
    "test_p2p_formats.py": 4,
    "test_p2p_wires.py": 2,
    "test_p2p_order.py": 5,
    "test_shmem_gpu.py": 4,
    "test_processes_gpu.py": 3,
    "test_process_faults.py": 1,
    "test_p2p_faults.py": 4,
    "test_experts.py": 6,
    "test_graph_layer.py": 3,
    "test_autodiff.py": 2,
    "test_quantized_grads.py": 2,
    "test_dispatch.py": 1,
    "test_combine.py": 1,
    "test_multiprocess.py": 1,
    "test_options_grads.py": 2,
    "test_options.py": 2,
    "test_split.py": 2,
    "test_soak.py": 1,
    "test_p2p_batches.py": 1,
    "test_examples.py": 1,
    "test_flax.py": 2,
    "test_flax_arguments.py": 2,
    "test_hopper_experts.py": 2,
    "test_fp8_kernels.py": 2,
    "test_benchmark_overlap.py": 1,
    "test_benchmark_layer.py": 1,
    "test_benchmark_tiny.py": 4,
}
