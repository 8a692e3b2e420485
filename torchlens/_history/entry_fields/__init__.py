"""The fields of a `LayerEntry` as users read them, a sentence each. What they mean: `columns`, in
the file named alike.
"""
