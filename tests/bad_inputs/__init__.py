"""Bad inputs of every kind through every command: see __main__.py."""
