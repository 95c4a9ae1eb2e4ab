# Written by .ci/fingerprints.py.
"""The fingerprints of the native modules that this Python code is for."""

FINGERPRINTS = {
    "_native_cpu": "ae21c4edcf0d",
    "_native_cuda": "0bbba0094956",
    "_native_shmem": "9d35801a8f57",
}
