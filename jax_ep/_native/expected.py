# Written by .ci/fingerprints.py.
"""The fingerprints of the native modules that this Python code is for."""

FINGERPRINTS = {
    "_native_cpu": "0098ac9e6b4b",
    "_native_cuda": "4f26085b3029",
    "_native_shmem": "9d35801a8f57",
}
