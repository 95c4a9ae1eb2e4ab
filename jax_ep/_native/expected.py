# Written by .ci/fingerprints.py.
"""The fingerprints of the native modules that this Python code is for."""

FINGERPRINTS = {
    "_native_cpu": "2f581e3f9836",
    "_native_cuda": "9c6e471be381",
    "_native_shmem": "9d35801a8f57",
}
