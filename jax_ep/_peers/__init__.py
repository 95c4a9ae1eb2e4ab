"""How the processes of a mesh find each other and map each other's memory."""
