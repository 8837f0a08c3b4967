"""The report of a study: ``summaries`` computes, ``tables`` and ``pictures`` show, ``page`` writes."""
