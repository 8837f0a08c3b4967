"""Traces of steps, with torch.profiler, and of GPU memory."""
