"""Gossip inside the frameworks that people train with, one module each, with an extra of its name.

    accelerate     GossipAccelerator, for loops in the style of Accelerate
    lightning      GossipStrategy, for Lightning's Trainer
    transformers   GossipTrainer, for Hugging Face's Trainer
    replicas       what a framework's checkpoint lacks: every worker's own state

All of them leave out the wrapper DDP, call ``decentralize`` on what the framework trains, give it
the average where it evaluates and saves, and keep every worker's state beside its checkpoints. They
use what a framework documents for subclasses; nothing here is imported by the rest of the package.
"""
