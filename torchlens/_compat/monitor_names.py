"""Names that users of torchexplorer, pytorch_inspector and wandb.watch know, and what they are
called here.

What means the same is taken as it is (`log=['io', 'params']`, `log_freq=`); of the rest, an error
says what to write. docs/coming-from-torchexplorer.md tells it all.
"""

from collections.abc import Mapping
from typing import Any

# monitor(log=[...]): words of torchexplorer, and 'all'; the kinds that each stands for ('*': every
# kind).
LOG_WORDS: dict[str, tuple[str, ...]] = {
    "io": ("inputs", "outputs"),
    "io_grad": ("gradients",),
    "params": ("parameters",),
    "params_grad": ("parameter_gradients",),
    "all": ("*",),
}

# monitor(...): options of theirs that are taken under another name.
_SAME = {"log_freq": "every"}

# monitor(...): options that are not, with what to do.
MONITOR_OPTIONS = {
    # torchexplorer.watch
    "backend": "leave it out: a run is always written to its folder; "
    "sinks=[torchlens.sinks.Wandb()] sends it on",
    "bins": "leave it out: bins are two an octave, so that histograms of all steps and runs can be "
    "added; open_run(folder)[address].outputs.histogram().linear(20) has 20 of equal width",
    "sample_n": "leave it out: 1,024 elements of each tensor are sampled, and its range is exact",
    "reject_outlier_proportion": "leave it out: nothing is rejected; .quantiles leave outliers "
    "aside",
    "delay_log_multibackward": "leave it out: several forward passes before a backward pass are "
    "recorded as they come",
    "disable_inplace": "leave it out: in-place layers are recorded as they are, and nothing in the "
    "model is changed",
    "ignore_io_grad_classes": "leave it out: in-place operations are no obstacle to gradients; "
    "modules= chooses modules",
    "time_log": "leave it out: time is counted in steps of the optimizer; run.step() ends one "
    "where there is none",
    "standalone_dir": "give the folder as the second argument: monitor(model, 'runs/a')",
    "standalone_port": "leave it out: `torchlens serve runs/` shows the page, and has --port",
    "verbose": "leave it out: run.problems says what could not be recorded",
    # wandb.watch
    "criterion": "leave it out: the log of the first recorded step gives the graph",
    "idx": "give each model a run, or a folder, of its own",
    "log_graph": "leave it out: the graph is always in the run; graph='modules' has it without "
    "operations",
    # pytorch_inspector's ParrallelHandler and DataRecorder
    "frequency": "every=10 records every tenth step",
    "timeout": "seconds=30 records for so long",
    "callback_onrun": "run.video('layer1', 'layer1.mp4'), or a sink of your own: sinks=[...]",
    "callback_onclosing": "run.finish(); a sink of your own has close()",
    "callback_transform": "run.watch('name', f(tensor)) records what a function makes of a tensor",
    "target_method": "leave it out: the worker process is always spawned",
    "daemon": "leave it out: the worker process ends with its parent, and finishes its videos "
    "before",
    "displayND_mode": "run.video(..., show='pca'), 'images', 'histogram' or 'tsne'",
    "fps": "run.video('layer1', 'layer1.mp4', fps=20)",
    "maxframes": "run.video(..., seconds=60) ends a video, and so does .stop()",
    "path_root": "run.video('layer1', 'output/layer1.mp4')",
    "shape_expected": "run.video(..., size=(640, 480))",
    "enabled": "run.pause() and run.resume()",
    "colorBGR": "leave it out: the colours of videos are fixed",
}

# run.video(...) and run.embed(...): the same, of one video.
_VIDEO_OPTIONS = {
    "frequency": "every=10 films every tenth recorded step",
    "timeout": "seconds=30 films for so long",
    "callback_onrun": "show='images', 'histogram', 'pca' or 'tsne', or a sink of your own: "
    "monitor(..., sinks=[...])",
    "callback_onclosing": "leave it out: the file is whole at any time",
    "callback_transform": "run.watch('name', f(tensor)), and run.video('name', 'name.mp4')",
    "displayND_mode": "show='pca', 'images', 'histogram' or 'tsne'",
    "maxframes": "seconds=60 ends a video, and so does .stop()",
    "path_root": "give the path as the second argument: run.video('layer1', 'output/layer1.mp4')",
    "shape_expected": "size=(640, 480)",
    "colorBGR": "leave it out: the colours of videos are fixed",
}

# torchlens.<name>
MONITOR_FUNCTIONS = {
    "watch": "monitor(model, 'runs/a') for a model, run.watch('name', tensor) for a tensor",
    "unwatch": "run.finish()",
    "attach": "run.watch('name', tensor), or current_run().watch('name', tensor)",
    "setup": "nothing in its place: monitor(model, 'runs/a') needs no preparation",
    "ParrallelHandler": "monitor(model, 'runs/a'), and current_run() from any other place",
    "ParallelHandler": "monitor(model, 'runs/a'), and current_run() from any other place",
    "DataRecorder": "run.video('layer1', 'layer1.mp4')",
    "track_model": "run.video('*', 'videos/{module}.mp4')",
    "track_layer": "run.video('layer1', 'layer1.mp4')",
    "track_tensor": "run.watch('name', tensor), and run.video('name', 'name.mp4')",
    "serve": "the command `torchlens serve runs/`",
}

# run.<name>
RUN_NAMES = {
    "attach": "watch('name', tensor)",
    "track_model": "video('*', 'videos/{module}.mp4')",
    "track_layer": "video('layer1', 'layer1.mp4')",
    "track_tensor": "watch('name', tensor), and video('name', 'name.mp4')",
    "enabled": "pause() and resume()",
    "set_enabled": "pause() and resume()",
    "stop": "finish()",
    "close": "finish()",
    "flush": "finish(); what is recorded can be read while it is written",
    "unwatch": "finish()",
    "explore": "torchlens.open_run(run.folder).explore('run.html')",
    "to_pandas": "torchlens.open_run(run.folder).to_pandas()",
}


def refuse_video_options(function: str, given: Mapping[str, Any], own: str) -> None:
    """TypeError, if there are any, says what to write."""
    for name in given:
        what = (
            f"Instead: {_VIDEO_OPTIONS[name]}." if name in _VIDEO_OPTIONS else f"Available: {own}."
        )
        raise TypeError(f"{function}() has no option {name!r}. {what}")


def known_options(given: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Our options, from ours and those of theirs that mean the same. TypeError says what to do
    about the others.
    """
    options = dict(own)
    for name, value in given.items():
        if name in _SAME:
            options[_SAME[name]] = value
            continue
        what = (
            f" Instead: {MONITOR_OPTIONS[name]}."
            if name in MONITOR_OPTIONS
            else f" Available: {', '.join(own)}."
        )
        raise TypeError(f"monitor() has no option {name!r}.{what}")
    return options
