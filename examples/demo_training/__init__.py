"""How `train_demo.py` makes the demo model: text, model, training, card."""
