"""How much of an exchange hides beside other work."""
