"""Several clients trained as one program: the setting `train.side_by_side`."""
