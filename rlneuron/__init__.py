"""rlneuron: the run. A YAML file becomes Ray actors on (simulated) Trainium cores, and these become steps.

Rooms: `rlneuron.device` (the neuron backend), `rlneuron.rollout` (generation), `rlneuron.trainer` (learning).
"""

__version__ = "0.1.0"
