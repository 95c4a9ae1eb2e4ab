# Written by .ci/fingerprints.py.
"""The fingerprints of the native modules that this Python code is for."""

FINGERPRINTS = {
    "_native_cpu": "4312c8588448",
    "_native_cuda": "4a2830301be3",
    "_native_shmem": "9d35801a8f57",
}
