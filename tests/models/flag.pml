/* One completion flag (shmring/flags.py) with its slot table, found word and slots, under a weak memory model.
 *
 * The engine takes the flag, polls it, claims, reads the slot numbers, un-claims, releases, cancels, and takes it again with a new
 * generation.  The daemon reads hints, publishes blocks, takes back unclaimed ones (to forget them, or to publish them again in other
 * slots), and frees the flags that the engine gave up: a record or its own scan of known requests shows them.  It overwrites unpinned
 * slots at once, as another request's data would.  Any record may find the ring full; the flag's states are never lost.
 *
 * Memory model.  The daemon's plain stores (slot contents, slot table, found word) go through a store buffer and reach memory
 * in any order; a release waits until they did.  The engine's plain loads return the value at its last acquire or fence, or the
 * present one.  A compare-and-swap is atomic and a release, and nothing more: the model does not count on its acquire half, and
 * later stores may reach memory before the exchanged word does (as after ldaxr/stlxr), while nobody else can write the word.
 * Where a mutation takes an order away, the other order is a choice.  A wrong guess of a later load's value is no execution
 * (`pruned`).
 *
 * The slot table is the pages that the engine lent to this use.  They change hands while the flag is FREE and no other way, so one
 * table per flag stands for them.
 *
 * Checked: until the engine gives it up, a claimed block is the hinted block of this generation (so: no claim of a slot that was
 * taken back, no stale slot table, even with an equal flag word, no slot reused under a claim); transitions out of CLAIMED never
 * fail; `found` belongs to this use; the flag always comes back (an invalid end state otherwise).  The daemon writes the disk word
 * where it writes `found`, and it carries the generation in the same way: `found` stands for both.
 * Mutations, each of which must make the check fail: the names M_* below (tests/models/test_models.py).
 */
#ifndef GENERATIONS
#define GENERATIONS 3
#endif
#define BLOCKS 2
#define SLOTS 2

#define FREE 0
#define HINTED 1
#define READY 2
#define CLAIMED 3
#define RELEASED 4
#define CANCELLED 5
#define EXPIRED 6
#define WORD(generation, state, count) ((generation) * 64 + (state) * 4 + (count))
#define GENERATION(word) ((word) / 64)
#define STATE(word) (((word) / 4) % 16)
#define COUNT(word) ((word) % 4)
#define BLOCK(generation, block) ((generation) * 4 + (block) + 1)
#define OTHER 255 /* another request's data */

/* memory */
byte flag;
bool locked; /* the daemon's exchange has the word; only the daemon's later stores can overtake it */
byte table[BLOCKS], slot[SLOTS], found;
#define HINT 1
#define DONE 2
chan ring = [2] of { byte, byte };

/* the daemon's store buffer */
byte b_table, b_slot, v_table[BLOCKS], v_slot[SLOTS], v_found;
bool b_found;
/* memory as the engine's last acquire left it */
byte e_table[BLOCKS], e_slot[SLOTS], e_found;
/* ghosts */
byte said; /* the generation for which the daemon last wrote `found` */
bool pruned;

#define DRAINED (b_table == 0 && b_slot == 0 && !b_found)

active proctype memory()
{
end:
    do
    :: atomic { b_table & 1 -> table[0] = v_table[0]; v_table[0] = 0; b_table = b_table & ~1 }
    :: atomic { b_table & 2 -> table[1] = v_table[1]; v_table[1] = 0; b_table = b_table & ~2 }
    :: atomic { b_slot & 1 -> slot[0] = v_slot[0]; v_slot[0] = 0; b_slot = b_slot & ~1 }
    :: atomic { b_slot & 2 -> slot[1] = v_slot[1]; v_slot[1] = 0; b_slot = b_slot & ~2 }
    :: atomic { b_found -> found = v_found; v_found = 0; b_found = false }
    od
}

#define STORE_SLOT(s, value) v_slot[s] = value; b_slot = b_slot | (1 << (s))
#define OVERWRITE(s) if :: pins & (1 << (s)) -> STORE_SLOT(s, OTHER) :: else fi

/* Unpin: other requests write into these slots from here on. */
inline reuse()
{
    atomic { OVERWRITE(0); OVERWRITE(1); pins = 0 }
}

#define GIVEN_UP(word) (STATE(word) == RELEASED || STATE(word) == CANCELLED)
#define UNCLAIMED(word) (STATE(word) == HINTED || STATE(word) == READY)
#ifdef M_GENERATION
#define SAME(word, generation) true
#else
#define SAME(word, generation) (GENERATION(word) == generation)
#endif

/* `word`, loaded before, is given up: unpin, then exchange FREE in.
 * SYNC slots: slots read before they are given up (acquire load of `word`) */
inline free_flag()
{
    reuse();
    atomic { serving = 0; block = 0 };
#ifndef M_FREE_SWAP
    atomic {
        assert(pruned || flag == word);
        flag = WORD(GENERATION(word), FREE, 0)
    }
#endif
}

active proctype daemon()
{
    byte word, key, kind, serving, block, s, pins, next;
    bool ok;
end:
    do
    :: ring ? kind, key -> /* SYNC tail orders the record itself; the flag says whether it still counts */
        word = flag;
        if
        :: SAME(word, key) && kind == HINT && STATE(word) == HINTED ->
            serving = key;
            block = 0;
            if /* the look-up may answer before the first block is there */
            :: atomic { v_found = BLOCK(serving, 1); b_found = true; said = serving }
            :: true
            fi
        :: SAME(word, key) && GIVEN_UP(word) -> free_flag()
        :: !(SAME(word, key) && (GIVEN_UP(word) || kind == HINT && STATE(word) == HINTED))
        fi;
        atomic { word = 0; key = 0; kind = 0 }
    :: serving && block < BLOCKS && !GIVEN_UP(flag) -> /* publish one block */
        if
        :: !(pins & 1) -> s = 0
        :: !(pins & 2) -> s = 1
        fi;
        atomic { pins = pins | (1 << s); STORE_SLOT(s, BLOCK(serving, block)) };
        atomic { v_table[block] = s; b_table = b_table | (1 << block) };
        atomic { v_found = BLOCK(serving, 1); b_found = true; said = serving };
#ifdef M_GENERATION
        key = GENERATION(flag);
#else
        key = serving;
#endif
        word = WORD(key, HINTED, block);
        if
        :: next = WORD(key, HINTED, block + 1)
        :: next = WORD(key, READY, block + 1)
        fi;
        /* SYNC flag: slot table and found word visible with the count (release exchange) */
#ifdef M_PUBLISH_SWAP
        ok = (flag == word);
        if
        :: ok -> DRAINED; flag = next
        :: else
        fi;
#else
        atomic {
            if
#ifdef M_PUBLISH_RELEASE
            :: flag == word -> flag = next; ok = true
#else
            :: flag == word && DRAINED -> flag = next; ok = true
#endif
            :: flag != word -> ok = false
            fi
        };
#endif
        atomic {
            block = (ok && STATE(next) == HINTED -> block + 1 : BLOCKS);
            word = 0; key = 0; next = 0; s = 0; ok = false
        }
    :: serving && UNCLAIMED(flag) -> /* take back, or expire */
        /* SYNC slots: slots read before they are given up (acquire load) */
        word = flag;
        if
        :: GENERATION(word) == serving && UNCLAIMED(word) ->
#ifdef M_EXPIRE_SWAP
            ok = (flag == word);
#else
            atomic {
                if
                :: flag == word && DRAINED -> locked = true; ok = true
                :: flag != word -> ok = false
                fi
            };
#endif
            if
            :: ok -> /* the stores that follow may be seen before the exchanged word */
                reuse();
                if
                :: atomic { flag = WORD(serving, HINTED, 0); locked = false; block = 0 }
                :: atomic { flag = WORD(serving, EXPIRED, 0); locked = false; serving = 0; block = 0 } /* forgotten */
                fi
            :: else
            fi
        :: else
        fi;
        atomic { word = 0; ok = false }
#ifdef M_EXPIRE_ACQUIRE
    :: serving && STATE(flag) == CLAIMED -> /* slots reused before the load that finds READY */
        reuse();
        atomic {
            STATE(flag) != CLAIMED ->
            if
            :: STATE(flag) == READY -> flag = WORD(serving, EXPIRED, 0); serving = 0
            :: else -> goto wrong_guess
            fi
        }
#endif
#ifdef M_FREE_ACQUIRE
    :: serving && STATE(flag) == CLAIMED -> /* slots reused before the load that finds RELEASED */
        reuse();
        atomic {
            STATE(flag) != CLAIMED ->
            if
            :: STATE(flag) == RELEASED -> flag = WORD(serving, FREE, 0); serving = 0
            :: else -> goto wrong_guess
            fi
        }
#endif
    :: serving && GENERATION(flag) == serving && GIVEN_UP(flag) -> /* found by the scan, without a nudge */
        word = flag;
        free_flag();
        word = 0
    od;
wrong_guess:
    pruned = true;
    do
    :: ok = !ok
    od
}

/* An acquire or fence, as far as what it brings is read before the next one. */
#define ACQUIRE_TOLD e_found = found
#define ACQUIRE_SLOTS e_table[0] = table[0]; e_table[1] = table[1]; \
    e_slot[0] = slot[0]; e_slot[1] = slot[1]
/* What was seen earlier matters only until the next acquire. */
#ifdef M_POLL_ACQUIRE
#define FORGET atomic { word = 0; count = 0; ok = false; first = 0; second = 0 }
#else
#define FORGET atomic { e_table[0] = 0; e_table[1] = 0; e_slot[0] = 0; e_slot[1] = 0; e_found = 0; \
    word = 0; count = 0; ok = false; first = 0; second = 0 }
#endif
#define LOAD(value, now, then) if :: value = now :: value = then fi
#define ENTRY(s, b) LOAD(s, table[b], e_table[b]); assert(pruned || s < SLOTS)
#define HOLDS(s, b) LOAD(value, slot[s], e_slot[s]); assert(pruned || value == BLOCK(generation, b))

/* Read the slot numbers of the claimed blocks, and let the workers copy them. */
inline use_claim()
{
    ENTRY(first, 0);
    if
    :: count == 2 -> ENTRY(second, 1)
    :: else
    fi;
    HOLDS(first, 0);
    if
    :: count == 2 -> HOLDS(second, 1)
    :: else
    fi;
    atomic { first = 0; second = 0; value = 0 }
}

/* Out of CLAIMED nobody else makes a transition: the exchange cannot fail. */
#define LEAVE_CLAIM(state, c) atomic { !locked -> assert(pruned || flag == word); flag = WORD(generation, state, c) }

/* A record that says so, if the ring has room; the state of the flag is what counts. */
inline nudge()
{
    if
    :: ring ! DONE, generation
    :: true
    fi
}

active proctype engine()
{
    byte generation, word, count, first, second, value;
    bool ok;
    do
    :: generation == GENERATIONS -> break
    :: else ->
        /* take */
#ifdef M_TAKE_SWAP
        flag = WORD(generation + 1, HINTED, 0);
#else
        atomic { flag == WORD(generation, FREE, 0) && !locked -> flag = WORD(generation + 1, HINTED, 0) };
#endif
        generation++;
        ring ! HINT, generation; /* the engine takes a flag only when the ring has room */
poll:
        /* SYNC flag: slot table and found word visible with the count (acquire load) */
        atomic {
            word = flag;
#ifndef M_POLL_ACQUIRE
            ACQUIRE_TOLD;
#endif
#ifdef M_CLAIM_FENCE
            ACQUIRE_SLOTS
#endif
        };
        assert(pruned || GENERATION(word) == generation);
        assert(pruned || (STATE(word) != CLAIMED && STATE(word) != FREE));
        LOAD(value, found, e_found);
#ifdef M_FOUND_GENERATION
        assert(pruned || value == 0 || said == generation);
#else
        assert(pruned || value / 4 != generation || said == generation);
#endif
        assert(pruned || COUNT(word) == 0 || value == BLOCK(generation, 1));
#ifndef M_POLL_ACQUIRE
        e_found = 0;
#endif
        value = 0;
        if
        :: STATE(word) == EXPIRED ->
#ifndef M_SEEN_SWAP
            atomic { !locked -> assert(pruned || flag == word); flag = WORD(generation, FREE, 0) }
#endif
        :: STATE(word) != EXPIRED -> FORGET; goto poll
        :: STATE(word) != EXPIRED -> /* cancel */
#ifdef M_CANCEL_SWAP
            ok = (flag == word);
            if
            :: ok -> atomic { !locked -> flag = WORD(generation, CANCELLED, 0) }
            :: else
            fi;
#else
            atomic {
                !locked -> ok = (flag == word);
                if
                :: ok -> flag = WORD(generation, CANCELLED, 0)
                :: else
                fi
            };
#endif
            if
            :: ok -> nudge()
            :: else -> FORGET; goto poll
            fi
        :: STATE(word) != EXPIRED && COUNT(word) > 0 -> /* claim all or less */
            if
            :: count = COUNT(word)
            :: count = 1
            fi;
#ifdef M_CLAIM_SWAP
            ok = (flag == word);
            if
            :: ok -> atomic { !locked -> flag = WORD(generation, CLAIMED, count) }
            :: else
            fi;
#else
            atomic {
                !locked -> ok = (flag == word);
                if
                :: ok -> flag = WORD(generation, CLAIMED, count)
                :: else
                fi
            };
#endif
            if
            :: !ok -> FORGET; goto poll
            :: else
            fi;
            word = WORD(generation, CLAIMED, count);
            /* SYNC claim: entry and claim cross (fence): the word may have come back since it was seen, with other entries */
#ifndef M_CLAIM_FENCE
            atomic { true -> ACQUIRE_SLOTS };
#endif
            if
            :: true -> /* un-claim.  SYNC slots: slots read before they are given up (release exchange) */
#ifdef M_UNCLAIM_RELEASE
                if
                :: LEAVE_CLAIM(READY, count); use_claim()
                :: use_claim(); LEAVE_CLAIM(READY, count)
                fi;
#else
                use_claim();
#ifndef M_UNCLAIM_SWAP
                LEAVE_CLAIM(READY, count);
#endif
#endif
                FORGET; goto poll
            :: true -> /* release.  SYNC slots: slots read before they are given up (release exchange) */
#ifdef M_RELEASE_RELEASE
                if
                :: LEAVE_CLAIM(RELEASED, 0); use_claim()
                :: use_claim(); LEAVE_CLAIM(RELEASED, 0)
                fi;
#else
                use_claim();
#ifndef M_RELEASE_SWAP
                LEAVE_CLAIM(RELEASED, 0);
#endif
#endif
                nudge()
            fi
        fi;
        FORGET
    od;
    STATE(flag) == FREE /* it always comes back */
}
