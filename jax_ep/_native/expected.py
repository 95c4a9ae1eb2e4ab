# Written by .ci/fingerprints.py.
"""The fingerprints of the native modules that this Python code is for."""

FINGERPRINTS = {
    "_native_cpu": "6e54692bafe8",
    "_native_cuda": "c26c7812c63e",
    "_native_shmem": "9d35801a8f57",
}
