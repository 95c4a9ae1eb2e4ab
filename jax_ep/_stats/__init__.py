"""How loads are counted and drawn."""
