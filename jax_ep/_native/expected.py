# Written by .ci/fingerprints.py.
"""The fingerprints of the native modules that this Python code is for."""

FINGERPRINTS = {
    "_native_cpu": "ab1a6cc09dfa",
    "_native_cuda": "a668f5e38453",
    "_native_shmem": "9d35801a8f57",
}
