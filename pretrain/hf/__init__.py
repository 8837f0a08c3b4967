"""To Hugging Face and back: the exported architecture and the parts of pretrain.convert."""
