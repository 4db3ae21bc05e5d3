"""The verb `gossamer lab`: parse, create the cluster, run, print.

Signals are handled here and nowhere else in the lab: the first one unwinds the `with` block that
owns the cluster, and later ones are ignored, because an interrupted removal would leave namespaces.
"""

from __future__ import annotations

import signal
import sys
from dataclasses import asdict
from types import FrameType
from typing import Annotated, NoReturn

import typer
from rich.markup import escape

from gossamer.cli.terminal import say, say_error, show, show_json
from gossamer.errors import UserError
from gossamer.lab.cluster import Cluster
from gossamer.lab.layout import Layout, one_switch, parse_layout
from gossamer.lab.namespaces import living_labs
from gossamer.lab.network import set_link
from gossamer.lab.processes import HostFailed, find_program
from gossamer.lab.verify import TOLERANCE, Measurement
from gossamer.rates import format_rate


def lab_command(  # noqa: PLR0913 - one parameter per option
    command: Annotated[
        list[str] | None, typer.Argument(help="Program and arguments to run on every host.")
    ] = None,
    hosts: Annotated[int, typer.Option(help="Number of hosts, with one worker each.")] = 4,
    rate: Annotated[
        str, typer.Option(help="Rate of each host's link, or one per host: 300mbit,1gbit.")
    ] = "",
    layout: Annotated[
        str, typer.Option(help="Nodes of several workers: 2x4:10gbit/1gbit (inside/between).")
    ] = "",
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Measure the rates, before the command if there is one."),
    ] = False,
    cut: Annotated[
        str, typer.Option(help="Cut a link of the lab that is running: host2, node0.")
    ] = "",
    restore: Annotated[str, typer.Option(help="Restore a link that was cut.")] = "",
    lab: Annotated[
        str, typer.Option(help="Id of the lab for --cut and --restore, if several are running.")
    ] = "",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print what --verify measures as JSON lines.")
    ] = False,
) -> None:
    """Run a command on emulated hosts with slow links.

    Needs Linux and root. The exit code is the command's, or 1
    if a rate that --verify measured is off.

    Examples:
    $ gossamer lab --hosts 4 --rate 300mbit -- python train.py
    $ gossamer lab --layout 2x4:10gbit/1gbit --verify
    $ gossamer lab --cut host2
    """
    if cut or restore:
        for link, up in ((cut, False), (restore, True)):
            if link:
                set_link(_choose(lab), link, up=up)
        return
    chosen = _layout(hosts, rate, layout)
    if as_json and (command or not verify):
        raise UserError(
            "--json prints what --verify measures, and needs it without a command, got "
            f"{'a command' if command else 'no --verify'}; write for example --verify --json"
        )
    if command or not verify:
        find_program(command or [])
    _unwind_on_signals()
    with Cluster(chosen) as cluster:
        say(f"lab {cluster.id}: {describe(chosen)}")
        if verify:
            _report(cluster.measure(), as_json=as_json)
        if command:
            _run(cluster, command)


def describe(layout: Layout) -> str:
    """Return a layout in one line."""
    rates = ", ".join(sorted({format_rate(host.rate_bits_s) for host in layout.hosts}))
    if not layout.uplink_bits_s:
        return f"{len(layout.hosts)} hosts at {rates}"
    between = format_rate(layout.uplink_bits_s[0])
    return f"{layout.num_nodes} nodes of {layout.hosts_per_node} at {rates}, {between} between"


def _layout(hosts: int, rate: str, layout: str) -> Layout:
    if bool(rate) == bool(layout):
        given = "both" if rate else "neither"
        raise UserError(
            f"a lab needs either --rate or --layout, got {given}; "
            "write for example --hosts 4 --rate 300mbit"
        )
    return parse_layout(layout) if layout else one_switch(hosts, rate)


def _choose(lab: str) -> str:
    labs = living_labs()
    chosen = [name for name in labs if lab in ("", name)]
    if len(chosen) == 1:
        return chosen[0]
    running = ", ".join(labs) or "none"
    raise UserError(
        f"--cut and --restore need one running lab, got {repr(lab) if lab else 'no --lab'} and "
        f"running: {running}; start one, or choose with --lab"
    )


def _run(cluster: Cluster, command: list[str]) -> None:
    try:
        cluster.run(command)
    except HostFailed as error:
        sys.stderr.write(f"error: {error}\n")
        raise typer.Exit(error.code) from None


def _report(measurements: list[Measurement], *, as_json: bool) -> None:
    for each in measurements:
        if as_json:
            show_json("rate", asdict(each) | {"holds": each.holds})
        else:
            show(escape(str(each)))
    wrong = [str(each) for each in measurements if not each.holds]
    if wrong:
        say_error(
            f"measured rates must be within {TOLERANCE:.0%} of the requested ones, "
            f"got {'; '.join(wrong)}; request a lower rate, or end other programs"
        )
        raise typer.Exit(1)


def _unwind_on_signals() -> None:
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def unwind(number: int, _frame: FrameType | None) -> NoReturn:
        for each in signals:
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    for each in signals:
        # nohup ignores SIGHUP on purpose, and a shell's background job may ignore SIGINT.
        if signal.getsignal(each) != signal.SIG_IGN:
            signal.signal(each, unwind)
