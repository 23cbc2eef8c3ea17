"""What is counted of a sequence that has ended."""

from types import SimpleNamespace

from offload.events import Finished, Gain, Speculated
from offload.metrics import Meter
from triforce_cli.serve.server_metrics import ServerMetrics


def test_decoding_time_is_counted_beside_that_of_plain_decoding():
    metrics = ServerMetrics()
    for gain in (Gain(4.0, 6.0, 0.5), None, Gain(1.0, 0.5, 0.5)):
        meter = Meter(5)
        meter.observe(Speculated("auto", "lookup", (), gain))
        meter.observe(Finished("eos"))
        metrics.ended(SimpleNamespace(meter=meter), None)
    lines = metrics.text().decode().splitlines()
    assert "triforce_decoding_seconds_total 5.0" in lines
    assert "triforce_plain_decoding_seconds_total 6.5" in lines
