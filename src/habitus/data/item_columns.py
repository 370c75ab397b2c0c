"""The item side of a dataset: tokenised, encoded and written in catalogue order."""

from contextlib import ExitStack
from pathlib import Path

from habitus.data.arrays import ArrayWriter
from habitus.data.category_lists import widen
from habitus.data.earlier import Earlier
from habitus.data.encoders import Encoders
from habitus.data.event_contents import EventContent, with_token_count, write_contents
from habitus.data.fields import item_file
from habitus.data.survey import ItemSurvey
from habitus.data.text import train_tokenizer
from habitus.progress import Progress


def write_items(
    survey: ItemSurvey,
    encoders: Encoders,
    stage: Path,
    progress: Progress,
    earlier: Earlier | None = None,
    contents: tuple[EventContent, ...] = (),
) -> Encoders:
    """Write every item's features, those of an earlier dataset first, the texts of the events, and the tokenizer.

    Returns the encoders with the tokenizer's size.
    """
    tokenizer = None
    if encoders.text_columns and earlier is not None:
        tokenizer = earlier.dataset.tokenizer
        earlier.copy_tokenizer(stage)
    elif encoders.fields.text_len:
        progress("training the tokenizer", 0.0)
        of_events = [text for content in contents for text in content.training_texts(survey.text.text_len)]
        tokenizer = train_tokenizer([*survey.texts, *of_events], survey.text.vocabulary_size)
        tokenizer.save(str(stage / "tokenizer.json"))
        fields = with_token_count(encoders.fields, tokenizer.get_vocab_size())
        encoders = encoders.model_copy(update={"fields": fields})
    write_contents(contents, encoders.fields, stage, tokenizer)
    fields, stream = encoders.fields, survey.stream
    num_done = 0
    with ExitStack() as open_files:
        writers = {}
        for number, spec in enumerate(fields.item):
            writer = ArrayWriter(stage / item_file(number), spec.stored_dtype, spec.row_shape(fields.text_len))
            writers[spec.name] = open_files.enter_context(writer)
        for chunk in earlier.item_chunks() if earlier is not None else ():
            for name, known in chunk.items():
                writers[name].append(widen(known, writers[name].row_shape))
        for batch in stream.batches():
            features = encoders.encode_items(survey.repair(batch), tokenizer)
            for spec in fields.item:
                values = features.tokens if spec.kind == "text" else features.fields[spec.name]
                assert values is not None
                writers[spec.name].append(values)
            num_done += batch.num_rows
            progress("encoding items", num_done / stream.num_items)
    return encoders
