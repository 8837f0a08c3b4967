"""What tests share: real ranks, real launches, small runs and models. Fixtures are in the conftest.py
files."""
