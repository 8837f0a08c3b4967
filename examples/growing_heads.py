"""Heads that grow while the model trains, and the schedule that comes of it.

python examples/growing_heads.py
"""

from pretrain import read_metrics, recipe, train

run = recipe(
    "growth",
    name="growing",
    steps=60,
    growth={"interval": 5, "calibration": 2, "maximum": 4, "grow_share": 0.5},
    validation={"every": 30},
)
trained = train(run)
model = trained.load_model()
rows = read_metrics(trained.run_folder)
print(f"heads {model.config.heads}, {model.config.num_parameters():,} parameters")
print(f"validation loss {rows[-1]['val_loss']:.2f}")

fixed = recipe("micro", model=str(trained.run_folder), name="found", steps=60)
print(f"from scratch: {read_metrics(train(fixed).run_folder)[-1]['val_loss']:.2f}")
