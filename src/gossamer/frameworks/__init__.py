"""Gossip inside training frameworks, one module each, with an extra of its name.

    accelerate     GossipAccelerator, for loops in the style of Accelerate
    lightning      GossipStrategy, for Lightning's Trainer
    transformers   GossipTrainer, for Hugging Face's Trainer
    replicas       every worker's own state, which the framework's checkpoint does not have

All of them disable the DDP wrapper, call ``decentralize`` on the framework's model and optimizer,
evaluate and save the average, and save every worker's state beside the framework's checkpoints.
They use documented extension points of the frameworks, and nothing else imports them.
"""
