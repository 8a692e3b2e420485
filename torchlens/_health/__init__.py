"""What is wrong with a model: findings, their thresholds, and the rules that several features
share.
"""
