"""The checks: which function of which app, what it shows, where, and how long it may take."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CHECKS", "Check"]

EVERYWHERE = ("cuda", "sim")
ON_GPU = ("cuda",)
GRAPHS = ("cuda", "cpu")
"""A made-up device compiles no graphs; on the CPU they are the same but for the device."""


@dataclass(frozen=True)
class Check:
    """One function of an app, run in a process of its own.

    Attributes:
        app: the module in `tests.gpu.apps`.
        function: its name there.
        shows: what is so if it returns.
        kinds: the kinds of device on which it means something; what runs without a GPU proves the check.
        limit: seconds after which it is killed and has failed.
    """

    app: str
    function: str
    shows: str
    kinds: tuple[str, ...] = EVERYWHERE
    limit: float = 60.0

    @property
    def name(self) -> str:
        return f"{self.app}.{self.function}"


CHECKS = (
    Check("placement", "main_holds_no_device", "the main process accepts cuda and starts nothing"),
    Check("placement", "devices_are_hidden_in_main", "CUDA_VISIBLE_DEVICES: hidden, and one per worker"),
    Check("placement", "nothing_of_us_is_left", "torch in a worker is torch as it comes"),
    Check("placement", "an_operation_costs_the_same", "operations in a worker and without us, printed"),
    Check("queries", "properties_are_the_devices_own", "device properties in main, field by field"),
    Check("queries", "a_worker_starts_after_all_questions", "all of torch.cuda asked in main, then a fork"),
    Check("weights", "weights_arrive_whole", "every bit, tie and view; one copy; files let go"),
    Check("weights", "a_startup_call_has_them_too", "the same, staged, before the app is live"),
    Check("weights", "two_workers_share_a_device", "two workers at once, each with its own weights"),
    Check("weights", "memory_is_empty_after_keep_warm", "no process, no memory once workers are gone"),
    Check("crossing", "tensors_cross_both_ways", "arguments, results and streams of CUDA tensors"),
    Check("crossing", "modules_go_by_reference", "a module in the arguments is the worker's own"),
    Check("crossing", "generators_made_in_main_draw", "generators made in main are real in a worker"),
    Check("crossing", "exceptions_carry_tensors", "an exception with a CUDA tensor in it"),
    Check("failures", "a_long_kernel_ends_in_time", "the deadline, while a kernel runs"),
    Check("failures", "a_killed_worker_frees_the_device", "SIGKILL, while a kernel runs"),
    Check("failures", "out_of_memory_harms_no_later_call", "out of memory, then a call that works"),
    Check(
        "failures", "a_broken_context_harms_no_later_call", "a failed kernel, then a call that works", ON_GPU
    ),
    Check("graphs", "a_graph_compiles_and_loads", "compile, apply, and run of a graph", GRAPHS, 240.0),
    Check("cold_start", "the_split_of_a_cold_start", "where the time of a cold start goes", GRAPHS, 240.0),
)
