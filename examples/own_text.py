"""Your own text to a model in transformers: corpus, run, export, and a continuation of a prompt.

    python examples/own_text.py [FILES OR FOLDERS OF TEXT …]

Without arguments it takes Python's package email, whose files come with every Python.
"""

import email
import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from pretrain import convert, read_metrics, recipe, train
from pretrain.prepare import command as prepare

texts = sys.argv[1:] or [str(Path(email.__file__).parent)]
prepare.main(["--text", *texts, "--train_tokenizer", "512", "--out", "data/own"])

run = recipe("modern-micro", data="data/own", name="own", steps=100, heads="8x2,4,2")
trained = train(run)
print(f"validation loss: {read_metrics(trained.run_folder)[-1]['val_loss']:.2f}")

convert.main([str(trained.run_folder), "--out", "hf/own", "--overwrite"])
tokenizer = AutoTokenizer.from_pretrained("hf/own", trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained("hf/own", trust_remote_code=True)
prompt = tokenizer("def", return_tensors="pt")
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=40, do_sample=False)[0]))
