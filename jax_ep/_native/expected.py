# Written by .ci/fingerprints.py.
"""The fingerprints of the native modules that this Python code is for."""

FINGERPRINTS = {
    "_native_cpu": "f1845c3905c0",
    "_native_cuda": "be62a37196de",
    "_native_shmem": "9d35801a8f57",
}
