"""What exchanges: collective, p2p and shmem, and which one serves a mesh."""
