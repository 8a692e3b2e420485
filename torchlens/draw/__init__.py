"""Drawing: history → scene (plain nodes, edges, boxes) → Graphviz."""

from torchlens.foreign_names import refuse_calls

refuse_calls(__name__, "To draw a model: torchlens.show_model_graph(model, x); to draw a history: history.render_graph().")
