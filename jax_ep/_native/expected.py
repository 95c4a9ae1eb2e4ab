# Written by .ci/fingerprints.py.
"""The fingerprints of the native modules that this Python code is for."""

FINGERPRINTS = {
    "_native_cpu": "b68a27032a46",
    "_native_cuda": "0a99b6965651",
    "_native_shmem": "9d35801a8f57",
}
