"""The only code that moves parameters between processes.

A module imports only from those below it in this table, which is also the order of reading; a
parameter goes through a step along ``step``, ``rank_context``, ``mixer`` and ``transport``.

    What a user calls
        decentralize       parse and check what this rank was given, compare it, connect
        checkpoints        all ranks save, restore and stop at one step
        scaler             all ranks skip a step or none does
        sampler            which samples of a step are this worker's
        gossip             the handle: average, measure, change parameters, save, end
    What a checkpoint is
        checkpoint_folder  files that are atomic and verified
    Before anything is sent
        preconditions      checks of one rank
        alone              the only worker, without a launcher
        late               a worker that comes when others train already
        handshake          the comparison across ranks
    A step
        worker             what the four above share: collective calls, the end
        model_state        what a model's state is while workers differ
        step               hooks around ``optimizer.step()``; blocks in which no step is taken
        epochs             the epoch that a gossip is in; the next when a worker is lost or joins
        donation           what a worker that joins gets from another
        snapshot           one rank's state as a file, or as bytes
        epoch              all that depends on who takes part, and what makes it
        rank_context       what an algorithm sees of this rank, and exchanges
        step_call          closures, steps within steps, other scalers
        rank_meter         what a controller sees of all ranks
        mixer              x ← W x on buckets, in two halves; owns what is in flight
        left_out           ranks whose parameters are not finite
        replica            the parameters in buckets; their average, and putting them back
        guard              parameters that are no longer what is sent
        shards             parameters that FSDP2 spreads over the ranks of a node
        wrapper_watch      DDP that averages gradients of what gossips
        instances          all living objects of a class
        buckets            parameters as views of flat tensors
    The wire
        within             the ranks that hold one replica together
        network            what opens and ends together
        transport          the messages and all-reduces of a round
        parcel             one bucket whose messages are not the bucket itself
        exchange           one bucket of a round, in flight and arrived
        marks              what is sent in place of parameters that are not finite
        collectives        what every rank takes part in
        all_gather         every rank's row on every rank, in few messages
        collector          a thread for what waits on others one after the other
        connections        process groups of our own, and work on them
        gloo               groups that connect only ranks that talk to each other
        telemetry          what it has cost
    Failures
        membership         who takes part from epoch to epoch, agreed on through the store
        epoch_watcher      the thread that polls an epoch's log and answers for this worker
        proposal           the rules by which a member proposes the next epoch
        epoch_log          the records that members write to the store about each epoch
        failures           where this rank is, and the error of what failed first
        causes             which rank stopped first
        notices            what ranks tell each other through the store
"""

from gossamer.gossip.checkpoints import Checkpoints
from gossamer.gossip.decentralize import decentralize
from gossamer.gossip.failures import ExchangeError
from gossamer.gossip.gossip import Gossip
from gossamer.gossip.sampler import MemberSampler
from gossamer.gossip.scaler import GradScaler
from gossamer.gossip.telemetry import Stats
from gossamer.nonfinite import NonFiniteError

__all__ = [
    "Checkpoints",
    "ExchangeError",
    "Gossip",
    "GradScaler",
    "MemberSampler",
    "NonFiniteError",
    "Stats",
    "decentralize",
]
