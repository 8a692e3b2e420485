"""What is wrong with a model: findings, the limits from which on something is one, and rules that several rooms share."""
