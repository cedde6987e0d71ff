"""The ONNX node test cases of Attention, from the installed onnx package.

    python3 tests/differential/onnx_cases.py [NAME...]

flashcore.attention computes each case, and flashcore.append adds new keys to the cache. The reference is
the onnx evaluator on the same inputs in f64. The Y of the case must be near the reference too, which
shows that the reference computes the case."""

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

# With onnx 1.23, opsets 23 to 25. Some cases also return the cache.
AT_LEAST = {"Y": 93, "present": 42}
# onnx computes Y in the type of the inputs and rounds after each operation.
ONNX_ROUNDINGS = 8.0
WIDE = (np.float16, np.float32, ml_dtypes.bfloat16)


def cases(names=()):
    """The cases with the operator itself. The other cases expand it into simpler operators."""
    with warnings.catch_warnings():  # from cases of other operators, which are generated too
        warnings.simplefilter("ignore")
        found = collect_testcases("Attention")
    return [one for one in found if [node.op_type for node in one.model.graph.node] == ["Attention"]
            and (not names or one.name in names)]


def exact(model, inputs):
    """{output: value} in f64."""
    wide = {name: one.astype(np.float64) if one.dtype in WIDE else one for name, one in inputs.items()}
    with warnings.catch_warnings():  # about infinities and NaN, which some cases test
        warnings.simplefilter("ignore")
        found = ReferenceEvaluator(model).run(None, wide)
    return dict(zip((one.name for one in model.graph.output), found))


def check(case, attend, tally):
    node = case.model.graph.node[0]
    given, expected = case.data_sets[0]
    inputs = dict(zip((one.name for one in case.model.graph.input), given))
    outputs = dict(zip((one.name for one in case.model.graph.output), expected))
    # In the order of the operator. Names in the graph may differ from those of the operator.
    by_input = {slot: inputs[name] for slot, name in zip(onnx_call.INPUTS, node.input) if name}
    attributes = {one.name: onnx.helper.get_attribute_value(one) for one in node.attribute}
    names = dict(zip(onnx_call.OUTPUTS, node.output))
    try:
        got = attend(by_input, attributes)
    except Exception as raised:  # noqa: BLE001: a finding
        tally.wrong(f"{case.name}: {common.short(raised)}")
        return
    want, y = exact(case.model, inputs)[names["Y"]], outputs[names["Y"]]
    limit = dense_reference.TOLERANCE[str(y.dtype)]
    onnx_error = dense_reference.error(y, want)
    if got["Y"].dtype != y.dtype:
        tally.wrong(f"{case.name}: gives {got['Y'].dtype}, onnx {y.dtype}")
    elif not onnx_error <= ONNX_ROUNDINGS * limit:
        tally.wrong(f"{case.name}: Y of onnx has error {onnx_error:.2e} against its evaluator in f64")
    else:
        tally.judge("Y", case.name, dense_reference.error(got["Y"], want), limit)
    for output in ("present_key", "present_value"):
        if not names.get(output):
            continue
        if np.array_equal(got[output], outputs[names[output]]):
            tally.right("present")
        else:
            tally.wrong(f"{case.name}: {output} differs from onnx")
    if names.get("qk_matmul_output"):
        tally.omitted("qk_matmul_output")
    if attributes.get("softmax_precision", onnx.TensorProto.FLOAT) != onnx.TensorProto.FLOAT:
        tally.omitted("softmax_precision")  # FlashCore uses f32, and f64 for f64 inputs


def compare(attend=onnx_call.attend, names=()):
    tally = common.Tally("onnx", AT_LEAST if not names else {"Y": 1})
    for case in cases(names):
        check(case, attend, tally)
    return tally


if __name__ == "__main__":
    sys.exit(compare(names=sys.argv[1:]).finish())
