"""Studies: variants of a recipe over seeds, and what they show together.

``study_file`` says which runs there are, ``scheduler`` and ``slurm`` run them, ``results`` reads what they
left, ``power`` plans how many are needed, and ``report`` shows what they say. A run belongs to no study by
itself: its folder is an ordinary one, and no code that trains imports this package.
"""
