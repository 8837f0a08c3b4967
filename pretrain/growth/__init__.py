"""Adds and prunes heads while a model trains, by what its layers measure."""
