"""ONNX's node cases of Attention, as the installed onnx package generates them.

    python3 tests/differential/onnx_cases.py [NAME...]

Each is computed by flashcore.attention, new keys go into a cache by flashcore.append. The reference is
onnx's own evaluator on the same inputs in f64; the case's Y must be near it too, or the reference would
not be what the case means."""

import sys
import warnings

import common
import dense_reference
import ml_dtypes
import numpy as np
import onnx
import onnx_call
from onnx.backend.test.case.node import collect_testcases
from onnx.reference import ReferenceEvaluator

# With onnx 1.23, opsets 23 to 25. Some cases also give the cache.
AT_LEAST = {"Y": 93, "present": 42}
# Y is computed in the inputs' type and rounded after each step.
OWN_ROUNDINGS = 8.0
WIDE = (np.float16, np.float32, ml_dtypes.bfloat16)


def cases(names=()):
    """Those with the operator itself; the others are the same, written out in simpler operators."""
    with warnings.catch_warnings():  # of other operators, which are generated too
        warnings.simplefilter("ignore")
        found = collect_testcases("Attention")
    return [one for one in found if [node.op_type for node in one.model.graph.node] == ["Attention"]
            and (not names or one.name in names)]


def exact(model, inputs):
    """{output: value} in f64."""
    wide = {name: one.astype(np.float64) if one.dtype in WIDE else one for name, one in inputs.items()}
    with warnings.catch_warnings():  # of infinities and NaN, which some cases are about
        warnings.simplefilter("ignore")
        found = ReferenceEvaluator(model).run(None, wide)
    return dict(zip((one.name for one in model.graph.output), found))


def check(case, attend, tally):
    node = case.model.graph.node[0]
    given, expected = case.data_sets[0]
    inputs = dict(zip((one.name for one in case.model.graph.input), given))
    outputs = dict(zip((one.name for one in case.model.graph.output), expected))
    # In the operator's order; a name of the graph may be another.
    places = {place: inputs[name] for place, name in zip(onnx_call.INPUTS, node.input) if name}
    attributes = {one.name: onnx.helper.get_attribute_value(one) for one in node.attribute}
    names = dict(zip(onnx_call.OUTPUTS, node.output))
    try:
        got = attend(places, attributes)
    except Exception as raised:  # noqa: BLE001: a finding
        tally.wrong(f"{case.name}: {common.short(raised)}")
        return
    want, y = exact(case.model, inputs)[names["Y"]], outputs[names["Y"]]
    limit = dense_reference.TOLERANCE[str(y.dtype)]
    own = dense_reference.error(y, want)
    if got["Y"].dtype != y.dtype:
        tally.wrong(f"{case.name}: gives {got['Y'].dtype}, onnx {y.dtype}")
    elif not own <= OWN_ROUNDINGS * limit:
        tally.wrong(f"{case.name}: onnx's Y is {own:.2e} from onnx's evaluator in f64")
    else:
        tally.judge("Y", case.name, dense_reference.error(got["Y"], want), limit)
    for place in ("present_key", "present_value"):
        if not names.get(place):
            continue
        if np.array_equal(got[place], outputs[names[place]]):
            tally.right("present")
        else:
            tally.wrong(f"{case.name}: {place} is not what onnx gives")
    if names.get("qk_matmul_output"):
        tally.omitted("qk_matmul_output")
    if attributes.get("softmax_precision", onnx.TensorProto.FLOAT) != onnx.TensorProto.FLOAT:
        tally.omitted("softmax_precision")  # FlashCore's is f32, and f64 for inputs in f64


def compare(attend=onnx_call.attend, names=()):
    tally = common.Tally("onnx", AT_LEAST if not names else {"Y": 1})
    for case in cases(names):
        check(case, attend, tally)
    return tally


if __name__ == "__main__":
    sys.exit(compare(names=sys.argv[1:]).finish())
