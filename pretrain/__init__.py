"""Everything around the network: configuration, data, training, checkpoints, commands."""
