"""Your own head schedule in plain PyTorch: the network without the rest of this project.

python examples/own_schedule.py
"""

import dataclasses
import string
from pathlib import Path

import torch

from model import Transformer, initialize, preset

text = Path(string.__file__).read_bytes()  # any text, byte by byte
data = torch.tensor([*text])
config = dataclasses.replace(
    preset("prism-micro"), heads=(1, 4, 16, 4), vocab_size=256, context_length=64, qk_norm="weighted"
)
model = Transformer(config)
initialize(model, seed=0)
print(model.config.summary())

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(0)
for step in range(1, 101):
    starts = torch.randint(len(data) - 65, (8,))
    windows = torch.stack([data[start : start + 65] for start in starts])  # [8, 65]
    loss = model(windows[:, :-1], windows[:, 1:])  # labels: the byte that follows each position
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step in (1, 10, 100):
        print(f"step {step}: loss {loss.item():.2f}")
