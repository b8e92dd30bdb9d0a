"""Chat format that makes training ids one text at a time, as it was done first: what many at once are held to."""

from collections.abc import Iterable, Iterator, Sequence

from attnpo.schema import EncodedResponse, Message
from attnpo.text.chat import NOT_A_PREFIX, ChatFormat, EncodedAnswers
from attnpo.text.ranges import Range, _find_gaps
from attnpo.text.refusals import RefusedText, check_text
from attnpo.text.traces import in_response


class OneAtATime(ChatFormat):
    """Chat format whose ids, ranges and counts are made text by text and token by token."""

    def encode_many(self, conversations: Iterable[tuple[Sequence[Message], Sequence[str]]]) -> Iterator[EncodedAnswers]:
        """Yields each prompt's responses before it renders the next prompt."""
        for prompt, responses in conversations:
            found, problem = EncodedAnswers([], []), None
            for response in responses:
                merged = self.counts[NOT_A_PREFIX]
                try:
                    found.encoded.append(self.encode(prompt, response))
                except RefusedText as refused:
                    problem = refused
                    break
                found.apart.append(self.counts[NOT_A_PREFIX] > merged)
            yield found._replace(problem=problem)

    def encode(self, prompt: Sequence[Message], response: str) -> EncodedResponse:
        """Encodes one response."""
        check_text(response, "the response")
        before = self.render(prompt, add_generation_prompt=True)
        full = self._with_response(prompt, before, response)
        pieces = self._locate(prompt, before, full, response)
        begin, end = len(before) if len(pieces) > 1 else pieces[0].start, pieces[-1].end
        ids, offsets = self.tokenize(full)
        seam = len(before)
        if full[seam:begin].strip():
            self._tell(full[seam:begin])
            seam = len(full[:begin].rstrip())
        prompt_ids, prompt_offsets = self.tokenize(full[:seam])
        count = len(prompt_ids)
        is_prefix = ids[:count] == prompt_ids and offsets[:count] == prompt_offsets
        if is_prefix:
            while seam > len(before) and count < len(ids) and offsets[count][1] <= begin:
                count += 1
            prompt_ids, ids, offsets = ids[:count], ids[count:], offsets[count:]
        else:
            seam = begin if seam > len(before) else seam
            prompt_ids, _ = self.tokenize(full[:seam])
            ids, offsets = self.tokenize(full[seam:], start=False)
            offsets = [(start + seam, stop + seam) for start, stop in offsets]
        ids, offsets = self._close(ids, offsets, end)
        offsets = grow(offsets, full, begin, end)
        ranges = [in_response(start, stop, pieces, len(response)) for start, stop in offsets]
        if not is_prefix:
            self.counts[NOT_A_PREFIX] += 1
        return EncodedResponse(list(prompt_ids), ids, ranges)

    def special_inside(self, encoded: EncodedResponse, response: str) -> int:
        """Counts special tokens that a response spells out."""
        return sum(
            token in self._special and response[start:end].strip().startswith(self._spelling[token])
            for token, (start, end) in zip(encoded.response_ids, encoded.offsets, strict=True)
            if end > start
        )


def grow(places: Sequence[Range], text: str, begin: int, end: int) -> list[Range]:
    """Extends ranges over the characters that none of them holds."""
    gaps = _find_gaps(places, text, begin, end)
    grown = []
    for start, stop in places:
        inside = begin < stop and start < end and start < stop
        first, last = gaps.get((start, True), start), gaps.get((stop, False), stop)
        grown.append((first, last) if inside else (start, stop))
    return grown
