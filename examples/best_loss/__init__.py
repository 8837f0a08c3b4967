"""An extension that remembers the best validation loss of a run. docs/architecture.md shows how it is put in
place."""
