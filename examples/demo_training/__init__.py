"""The parts of `train_demo.py`: text, model, training, card."""
