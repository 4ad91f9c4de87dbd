"""Optional rewrites of a model's layers, one file each, applied by models.py before either room sees the module.

Learner, engine and reference so run the same layers. Each rewrite keeps parameters, names and results (to rounding).
"""
