"""How processes meet and reach each other's memory."""
