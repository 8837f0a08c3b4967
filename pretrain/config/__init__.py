"""The settings of a run: RunConfig, learning-rate rules, recipes and flags, and the parser of every command.

What a setting means belongs to the package that uses it. Nothing heavy is imported here.
"""
