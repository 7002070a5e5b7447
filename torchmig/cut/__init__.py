"""The consistent cut: where all ranks of a job stand still with nothing half done between them.

A cut is one position a rank, such that all members of a group have issued equally many operations
on it and every channel has as many receives as sends. The `Planner` finds the first cut that the
job can still reach, from the ranks' own counters and without a message on the job's channels.
Everything in this package is a pure function of its arguments: no torch, no input or output, no
thread, no clock.

The rule that a rank follows
============================
Counters. One for each key that the rank has used, never forgotten and never falling (but see
"counts first"), under the text form of the key:

    collective/GROUP                    an operation of a group; one coalesced call counts once
    collective/PSEUDO-GROUP             init_process_group, new_group and the like; its members
                                        are the ranks that must all call it
    send/SOURCE/DESTINATION/TAG/GROUP   global ranks; TAG is 0 where the backend ignores it
    recv/SOURCE/DESTINATION/TAG/GROUP   SOURCE is -1 for a receive from any source
    block/RANK/GROUP                    a coalesced block (start to end), opened by RANK

Sections. A coalesced block and the creation of a group are sections: they are counted and may be
held where they begin. Inside a section every operation is counted on its own key and never held,
no thread of it is parked, and the rank is BUSY. So a block may take a counter past its target; the
planner follows. A section's beginning is counted under the lock, together with becoming BUSY: what
it will issue is not counted yet, so it must not begin after a report that already shows it.

Orders. At most one is active: the one with the highest serial of the newest request; an older one
is dropped. Missing targets are 0. With c the counter of key k, not yet counting the operation at
hand, and "met" meaning that every counter named in `targets` has reached its value:

    at a gate, before an operation on k    held while level >= GATE and c + 1 > targets[k];
                                           else counted and let through
    at the end of an optimizer step        parked while level >= STEP and met
    at a Python safe point (main thread)   parked while level >= ANY and met
    in a wait for a key of the store       counts as parked there; under a final order the wait
                                           does not return

All four are looked at again when an order comes in: whoever need not stand under the new order
goes on. Level FREE holds nobody.

Counts first. With no order active a gate does no more than add one to the counter and then look
whether an order is active (both sequentially consistent). If one is, it takes the lock, and if the
operation is held it takes the one back before it reports. A report may therefore show an operation
as issued that is held after all, and the next report one less. What it shows is always the rank's
very next operation on that key. It costs the cut one operation more than need be, no harm else; a
gate that looks once before it counts as well, and takes the lock first if an order is active,
saves most of that.

Reports. A rank answers every order, also a repeated one, with a report that carries its serial.
Threads that the order lets go may be still asleep in it, but whatever the order holds must be held.
It also reports when its state, place or held keys change,
and, while it runs, a few milliseconds after its counters have changed. `sequence` grows with each.
A rank is PARKED when a thread of it stands at one of the four places; `waiting` names, in every
state, the key of every thread that is held at a gate, not of one only: letting the wrong one
through for ever would be no progress. A final order holds like any other; a rank that had passed
something shows it in its counters, and then the stand is off. A rank that answers a final order as
PARKED vouches that until the next order no other thread of it runs Python either (the
interpreter's lock is taken): a thread in the background could reach no gate, but print, write a
file, or end.
"""

from torchmig.cut.explain import RankView, blame, describe_key, explain
from torchmig.cut.keys import ANY_SOURCE, Block, Channel, Collective, Direction, Key, parse_key
from torchmig.cut.messages import Level, Order, Place, Report, State
from torchmig.cut.planner import (
    Orders,
    Pending,
    Planner,
    PlannerOptions,
    Stand,
    Verdict,
    Withdrawn,
)
from torchmig.cut.rounds import (
    pack_orders,
    pack_reports,
    split_orders,
    unpack_orders,
    unpack_reports,
)
from torchmig.cut.rule import holds, meets, parks

__all__ = [
    "ANY_SOURCE",
    "Block",
    "Channel",
    "Collective",
    "Direction",
    "Key",
    "Level",
    "Order",
    "Orders",
    "Pending",
    "Place",
    "Planner",
    "PlannerOptions",
    "RankView",
    "Report",
    "Stand",
    "State",
    "Verdict",
    "Withdrawn",
    "blame",
    "describe_key",
    "explain",
    "holds",
    "meets",
    "pack_orders",
    "pack_reports",
    "parks",
    "parse_key",
    "split_orders",
    "unpack_orders",
    "unpack_reports",
]
