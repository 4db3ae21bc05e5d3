"""The only code that moves parameters between processes.

A module imports only from those below it in this table, which is also the order to read them in. A
step moves parameters through ``step``, ``rank_context``, ``mixer`` and ``transport``.

    The public interface
        decentralize       parse and validate this rank's arguments, compare them, connect
        checkpoints        all ranks save, restore and stop at the same step
        scaler             all ranks skip a step or none does
        sampler            the samples of a step that this worker trains on
        gossip             the handle: average, measure, change parameters, save, end
    Checkpoints on disk
        checkpoint_folder  files that are atomic and verified
    Before anything is sent
        preconditions      checks that one rank can make by itself
        alone              a process group of one, without a launcher
        late               a worker that starts while others already train
        handshake          the comparison across ranks
    A step
        worker             shared by the public classes: collective calls, teardown
        model_state        warns where one replica would be saved as if it were the model
        step               hooks around ``optimizer.step()``; blocks that suspend stepping
        epochs             the current epoch, and the next one when a worker is lost or joins
        donation           the state that a joining worker receives from its donor
        snapshot           one rank's state as a file, or as bytes
        epoch              everything that depends on the members, and its construction
        rank_context       the ``StepContext`` of a rank, which algorithms run on
        step_call          closures, nested steps, foreign gradient scalers
        rank_meter         measurements of all ranks, for controllers
        mixer              x ← W x on buckets, started and finished; owns exchanges in flight
        left_out           ranks whose parameters are not finite
        replica            parameters in buckets; averaging and restoring them
        guard              detects parameters that differ from the ones in flight
        shards             parameters that FSDP2 shards over the ranks of a node
        wrapper_watch      detects DDP that averages the gradients of gossiping ranks
        instances          all live objects of a class
        buckets            parameters as views of flat tensors
    The wire
        within             the ranks that hold one replica together
        network            the connections of one epoch, opened and closed together
        transport          the messages and all-reduces of a round
        parcel             one bucket of a wire format that encodes its messages
        exchange           one bucket of a round, in flight and arrived
        marks              messages of ranks that are left out
        collectives        operations of all ranks
        all_gather         every rank's row on every rank, in few messages
        collector          a thread for operations that wait on peers one after the other
        connections        process groups of our own, and work on them
        gloo               groups that connect only the ranks that exchange messages
        telemetry          bytes, messages and seconds so far
    Failures
        membership         the members of each epoch, agreed on through the store
        epoch_watcher      the thread that polls an epoch's log and answers for this worker
        proposal           the rules by which a member proposes the next epoch
        epoch_log          the records that members write to the store about each epoch
        failures           the position of this rank, and the error of the first failure
        causes             which rank stopped first
        notices            messages between ranks through the store
        store_query        queries to the store with a deadline
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
