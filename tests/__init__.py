"""Tests, one file for each file of model/ and pretrain/, and the helpers they share."""
