"""From text to batches: corpus -> tokenizer -> prepare -> sequences."""
